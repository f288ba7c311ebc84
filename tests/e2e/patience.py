"""How long a test of the whole application waits for what must come: a machine that others keep busy may stand still for minutes."""

PATIENCE_S = 300
