"""From a call to a plan, without any framework or device. Imports the standard library alone."""
