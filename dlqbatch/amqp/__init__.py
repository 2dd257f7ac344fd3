"""One AMQP message as bytes and as meaning: read what is needed, carry everything else untouched."""
