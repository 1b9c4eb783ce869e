"""Packages the user's code for nodes: the files to upload (file_list.py) and one archive (archive.py)."""
