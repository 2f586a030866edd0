"""What people see: the command line, status, metrics, the page and the demo."""
