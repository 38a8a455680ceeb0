"""The processes of a run: process group, inference replica, work queue, preemption."""
