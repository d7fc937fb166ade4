"""Random programs against the truth: whole batches (`whole`) and replicas (`replicas`)."""
