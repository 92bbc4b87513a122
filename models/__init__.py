"""Models to read, copy and change: one file a family, for one device, importing no elastix."""
