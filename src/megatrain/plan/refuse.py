from megatrain.errors import NotEnoughMemory
def refusal(search, limits):
    return NotEnoughMemory(str(search.shortfall()))
