"""Running a job under a seeded schedule of faults, and comparing what it leaves with the undisturbed run."""
