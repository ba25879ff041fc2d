package main

import (
	"io"
	"os"
	"testing"
)

func TestMain(tests *testing.M) {
	code := tests.Run()
	if code == 0 {
		io.Copy(os.Stdout, os.Stdin)
	}
	os.Exit(code)
}
