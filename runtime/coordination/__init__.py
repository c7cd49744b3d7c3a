"""Keeps in etcd the records of a run, the view that processes watch, the event log, and the way there."""
