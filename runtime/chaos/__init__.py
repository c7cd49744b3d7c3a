"""Running a job under a seeded schedule of faults, and comparing what it leaves with the undisturbed run.

In the order of reading: `fault_schedule` (which faults, when), `host` (the job's processes and etcd, from outside),
`probe` (how far the job is), `recovery` (how long each fault stopped it),
`compare` (bit by bit), `report`, `run`, `command`.
"""
