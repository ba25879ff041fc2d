"""One file or folder per format; a new one is found by scanning."""
