"""Report pages and figures."""
