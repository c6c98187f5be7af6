"""How the agents of many machines run one job: who takes part, as whom, and what follows when something ends."""
