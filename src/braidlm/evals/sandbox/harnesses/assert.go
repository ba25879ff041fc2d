// Package assert has the one check of testify that the tests of HumanEval-X use.
package assert

import (
	"bytes"
	"reflect"
	"testing"
)

type Assertions struct{ t *testing.T }

func New(t *testing.T) *Assertions { return &Assertions{t} }

func (a *Assertions) Equal(expected, actual interface{}, message ...interface{}) bool {
	a.t.Helper()
	one, isBytes := expected.([]byte)
	other, alsoBytes := actual.([]byte)
	if isBytes && alsoBytes && one != nil && other != nil && bytes.Equal(one, other) {
		return true
	}
	if reflect.DeepEqual(expected, actual) {
		return true
	}
	a.t.Errorf("not equal: expected %#v, got %#v", expected, actual)
	return false
}
