"""Reports from the store: tables, charts and HTML pages."""
