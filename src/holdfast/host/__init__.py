"""What holdfast asks of the operating system of the machine it runs on: processes, limits, groups with a limit."""
