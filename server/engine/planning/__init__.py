"""What fits: planned from files' headers and settings, before anything is loaded."""
