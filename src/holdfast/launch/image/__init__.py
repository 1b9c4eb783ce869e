"""Container images for runs: prints a Dockerfile for a base image, and checks an image's files offline.

`image_files` reads a root file system, a `docker save` or an OCI archive without unpacking it; `image_checks` judges
what was read with pure functions.
"""
