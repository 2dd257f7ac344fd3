  // What RepublishMessageRecoverer of Spring AMQP sends: the error in these headers, and all that the message had.
  static void handOver(Channel channel, String queue, Delivery message, Exception error) throws Exception {
    Map<String, Object> headers = new HashMap<>();
    if (message.getProperties().getHeaders() != null) headers.putAll(message.getProperties().getHeaders());
    StringWriter stack = new StringWriter();
    new ListenerExecutionFailedException(error).printStackTrace(new PrintWriter(stack));
    headers.put("x-exception-stacktrace", stack.toString());
    headers.put("x-exception-message", error.getMessage());
    headers.put("x-original-exchange", message.getEnvelope().getExchange());
    headers.put("x-original-routingKey", message.getEnvelope().getRoutingKey());
    headers.put("dlqbatch-failed-queue", queue);
    headers.put("dlqbatch-failed-exchange", message.getEnvelope().getExchange());
    headers.put("dlqbatch-failed-key", message.getEnvelope().getRoutingKey());
    AMQP.BasicProperties sent = message.getProperties().builder().headers(headers).deliveryMode(2).build();
    channel.basicPublish("retry-exchange", "retry-routing-key", true, sent, message.getBody());
    channel.waitForConfirmsOrDie(30_000);
    channel.basicAck(message.getEnvelope().getDeliveryTag(), false);
  }

  static class ListenerExecutionFailedException extends RuntimeException {
    ListenerExecutionFailedException(Exception cause) { super("Listener threw exception", cause); }

    @Override public String toString() {
      return "org.springframework.amqp.rabbit.support.ListenerExecutionFailedException: " + getMessage();
    }
  }
