"""The life of a job: discovery of ranks and hosts, choice of transports, shutdown."""
