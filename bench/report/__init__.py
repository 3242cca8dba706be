"""Views of the store: tables for the terminal and for pages, pictures, HTML."""
