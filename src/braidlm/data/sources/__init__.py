"""Where text comes from. One file per kind of source, found by scanning."""
