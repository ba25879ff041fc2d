"""`braid edit select`: the rules by which gates stay or go, the edit, and its report."""
