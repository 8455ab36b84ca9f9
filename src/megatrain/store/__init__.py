"""Where state lives: slabs, memory tiers, and the parameters that users see."""
