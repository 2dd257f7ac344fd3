<?php
// `symfony_worker.php send NAME...` sends messages; `symfony_worker.php work` is a worker with the listener of
// docs/clients/symfony.md, which the test has written beside its `calls`. Wired by hand: there is no kernel. Its
// transport has the options of the page's YAML (TRANSPORT_OPTIONS).
// RETRIES is how often Symfony itself tries again.

use Symfony\Component\EventDispatcher\EventDispatcher;
use Symfony\Component\Messenger\Bridge\Amqp\Transport\AmqpStamp;
use Symfony\Component\Messenger\Bridge\Amqp\Transport\AmqpTransport;
use Symfony\Component\Messenger\Bridge\Amqp\Transport\Connection;
use Symfony\Component\Messenger\Envelope;
use Symfony\Component\Messenger\EventListener\SendFailedMessageForRetryListener;
use Symfony\Component\Messenger\Handler\HandlersLocator;
use Symfony\Component\Messenger\MessageBus;
use Symfony\Component\Messenger\Middleware\HandleMessageMiddleware;
use Symfony\Component\Messenger\Retry\MultiplierRetryStrategy;
use Symfony\Component\Messenger\Worker;

spl_autoload_register(static function (string $class): void {
    @include_once str_replace('\\', '/', $class).'.php';
});

const CAUSES = [
    'declined' => [PaymentDeclined::class, 'card of order %s declined'],
    'once' => [PaymentDeclined::class, 'card of order %s declined'],
    'refused' => [RuntimeException::class, 'SQLSTATE[08006] connection to server at "10.0.0.1", port 5432 failed'],
    'missing' => [OutOfBoundsException::class, 'the order has no total'],
    'late' => [NoAnswer::class, 'no answer for order %s'],
];

final class Pay
{
    public function __construct(public string $name)
    {
    }
}

final class PaymentDeclined extends Exception
{
}

final class NoAnswer extends Exception
{
}

final class Services implements Psr\Container\ContainerInterface
{
    public function __construct(private object $service)
    {
    }

    public function get(string $id): object
    {
        return $this->service;
    }

    public function has(string $id): bool
    {
        return 'orders' === $id;
    }
}

function checkAmount(string $number): void
{
    throw new InvalidArgumentException("amount of order $number is negative");
}

function checkAccount(string $number): void
{
    throw new InvalidArgumentException("account of order $number is overdrawn");
}

function pay(Pay $message): void
{
    $calls = getenv('WORK_FOLDER').'/calls';
    $isSecond = is_file($calls) && in_array($message->name, preg_split('/\s/', file_get_contents($calls)), true);
    $isHandled = is_file(getenv('WORK_FOLDER').'/mended') || (str_starts_with($message->name, 'once') && $isSecond);
    file_put_contents($calls, $message->name.($isHandled ? ' handled' : ' failed')."\n", FILE_APPEND);
    if ($isHandled) {
        return;
    }
    [$cause, $number] = explode('-', $message->name);
    if (isset(CAUSES[$cause])) {
        [$class, $text] = CAUSES[$cause];
        throw new $class(sprintf($text, $number));
    }
    'negative' === $cause ? checkAmount($number) : checkAccount($number);
}

$connection = Connection::fromDsn(getenv('AMQP_URL'), json_decode(getenv('TRANSPORT_OPTIONS'), true));
$transport = new AmqpTransport($connection);

if ('send' === $argv[1]) {
    foreach (array_slice($argv, 2) as $name) {
        $transport->send(new Envelope(new Pay($name), [new AmqpStamp('order.pay')]));
    }
    exit;
}

require getenv('WORK_FOLDER').'/HandOverFailures.php';
$events = new EventDispatcher();
$services = new Services($transport);
$retries = new Services(new MultiplierRetryStrategy((int) (getenv('RETRIES') ?: 0), 1, 1));
$events->addSubscriber(new SendFailedMessageForRetryListener($services, $retries));
$events->addSubscriber(new HandOverFailures($connection));
$handlers = new HandlersLocator([Pay::class => ['pay']]);
$bus = new MessageBus([new HandleMessageMiddleware($handlers)]);
(new Worker(['orders' => $transport], $bus, $events))->run(['sleep' => 20000]);
