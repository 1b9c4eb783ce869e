"""Operating-system functions of the local machine: processes, limits, cgroups and files."""
