"""Django looks here for filters."""
