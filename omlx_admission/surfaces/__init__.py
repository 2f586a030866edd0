"""What people see: the command line, later status, metrics and the page."""
