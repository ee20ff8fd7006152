"""Run the lines of a timetable on one rank: on real processes, or simulated. There is one generator for a rank."""
