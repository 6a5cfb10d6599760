"""One module for each command, as Django looks for them."""
