"""What people and programs see of a run: one view, shown as a page, as metrics and in a terminal."""
