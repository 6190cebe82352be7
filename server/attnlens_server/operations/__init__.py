"""Operations on a model, one module each: request, plan, result and steps."""
