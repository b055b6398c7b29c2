"""What crmctl talks to: PostgreSQL, and later Kafka, portals, identity."""
