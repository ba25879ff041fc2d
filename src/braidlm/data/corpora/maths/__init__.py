"""The `maths` corpus."""
