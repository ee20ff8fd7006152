"""Start the processes of a mesh, join them into a job, and end all of them when one fails."""
