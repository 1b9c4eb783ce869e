"""What a rank measures, and where its metrics go."""
