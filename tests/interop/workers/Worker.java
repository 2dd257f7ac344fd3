// A worker with the recipe of docs/failure-contract.md, which the test puts in its place below.
import com.rabbitmq.client.AMQP;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.Delivery;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.time.Instant;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

public class Worker {
  static final Path FOLDER = Path.of(System.getenv("WORK_FOLDER"));

  // RECIPE

  static class PaymentDeclined extends Exception {
    PaymentDeclined(String message) { super(message); }
  }

  static void fail(String name) throws Exception {
    String[] parts = name.split("-");
    switch (parts[0]) {
      case "declined": case "once": throw new PaymentDeclined("card of order " + parts[1] + " declined");
      case "refused": throw new java.net.ConnectException("Connection refused");
      case "missing": Object total = Map.of().get("total"); total.toString();
      case "late": throw new java.util.concurrent.TimeoutException("no answer for order " + parts[1]);
      case "negative": checkAmount(parts[1]);
      default: checkAccount(parts[1]);
    }
  }

  static void checkAmount(String number) {
    throw new IllegalArgumentException("amount of order " + number + " is negative");
  }

  static void checkAccount(String number) {
    throw new IllegalArgumentException("account of order " + number + " is overdrawn");
  }

  static void work(String name) throws Exception {
    Path calls = FOLDER.resolve("calls");
    boolean isFirst = !Files.exists(calls) || !List.of(Files.readString(calls).split("\\s")).contains(name);
    boolean isHandled = Files.exists(FOLDER.resolve("mended")) || (name.startsWith("once") && !isFirst);
    String line = name + (isHandled ? " handled\n" : " failed\n");
    Files.writeString(calls, line, StandardOpenOption.CREATE, StandardOpenOption.APPEND);
    if (!isHandled) fail(name);
  }

  public static void main(String[] arguments) throws Exception {
    ConnectionFactory factory = new ConnectionFactory();
    factory.setUri(System.getenv("AMQP_URL"));
    Connection connection = factory.newConnection();
    Channel channel = connection.createChannel();
    channel.confirmSelect();
    channel.addReturnListener(returned -> Runtime.getRuntime().halt(1));
    channel.basicConsume("orders", false, (tag, message) -> {
      try {
        work(new String(message.getBody()));
        channel.basicAck(message.getEnvelope().getDeliveryTag(), false);
      } catch (Exception error) {
        try {
          handOver(channel, "orders", message, error);
        } catch (Exception unpublished) {
          Runtime.getRuntime().halt(1);
        }
      }
    }, tag -> { });
  }
}
