"""Model wrappers used by the engines that run on the global thread."""
