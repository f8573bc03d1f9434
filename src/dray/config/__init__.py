"""What a user writes: recipes, images and sites, as frozen, validated models."""
