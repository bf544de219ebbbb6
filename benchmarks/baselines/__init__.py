"""What unlearnd is measured against: the same method, written the way research code usually is."""
