"""Keys with revisions that the agents of a job share: in an etcd, or in the agent of rank 0. Knows nothing of jobs."""
