"""Plans memory from files' headers and settings, before anything is loaded."""
