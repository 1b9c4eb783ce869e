"""Who may speak to a controller, and how much: keys, limits, and the door they are held at."""
