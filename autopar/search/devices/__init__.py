"""Choose the mesh, and on paper the pipeline, for a number of devices."""
