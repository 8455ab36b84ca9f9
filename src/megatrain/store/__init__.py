"""Where state lives: slab layout, host memory, and the parameters users see."""
