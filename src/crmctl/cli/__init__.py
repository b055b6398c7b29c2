"""The face: parses, calls a job, renders. No SQL, no Kafka."""
