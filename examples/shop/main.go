// Command shop is an example of a shop in front of Stampede: a page that buys from the browser, a demo login that signs
// the buyers' tokens, and a fake payment provider whose webhooks the shop reports to Stampede.
//
//	main.go       flags, start and stop
//	dev.go        with -dev: runs "stampede dev" and creates a sale of shirts in three sizes; with -draw, has them drawn
//	server.go     serves the page, and signs tokens
//	payments.go   the shop's side of payments: verifies webhooks, and reports the money
//	provider.go   the fake payment provider
//	page/         the page, without a build step
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	ctx, restore := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer restore()
	context.AfterFunc(ctx, restore) // the second signal ends the process
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "shop:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	addr := flag.String("addr", "127.0.0.1:8070", "where the shop listens, `host:port`")
	api := flag.String("api", "http://127.0.0.1:8080", "`URL` of an ingress of Stampede, as browsers reach it")
	sale := flag.String("sale", "", "`id` of the sale to show")
	dev := flag.String("dev", "", "`path` of the program stampede: run \"stampede dev\" and create a sale in it")
	opensIn := flag.Duration("opens-in", 20*time.Second, "with -dev: when the sale opens, or its entries close")
	stock := flag.Int("stock", 20, "with -dev: shirts for sale of each size")
	window := flag.Duration("window", 2*time.Minute, "with -dev: how long a buyer has to pay")
	pace := flag.Int("pace", 0, "with -dev: how many buyers a `second` get their turn to pay, 0 for all")
	others := flag.Int("draw", 0, "with -dev: draw the shirts of each size among visitors and so many `others`")
	waitlist := flag.Bool("waitlist", false, "with -dev: sell at once, and offer shirts that return to who waits for the size")
	flag.Parse()

	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", *addr)
	if err != nil {
		return fmt.Errorf("%w: give another address by -addr", err)
	}
	defer func() { _ = listener.Close() }()
	origin := "http://" + listener.Addr().String()
	config := shopConfig{
		API: *api, Sale: *sale, Origin: origin,
		Secret: os.Getenv("SHOP_JWT_SECRET"), Cashier: os.Getenv("SHOP_CASHIER_TOKEN"),
	}
	ended := make(chan error, 2)
	var draw *drawn
	if *dev != "" {
		started, err := startDev(ctx, *dev, origin)
		if err != nil {
			return err
		}
		defer started.stop()
		go func() { ended <- fmt.Errorf("stampede dev has ended: %w", started.wait()) }()
		config.API, config.Secret, config.Cashier = started.api, started.secret, started.cashier
		switch {
		case *others > 0:
			if draw, err = started.createDraw(ctx, 0, *opensIn, *window, newSizes(*stock)...); err == nil {
				config.Sale = draw.goods
			}
		case *waitlist:
			config.Sale, err = started.createWaitlist(ctx, 0, *window, newSizes(*stock)...)
		default:
			config.Sale, err = started.createSale(ctx, 0, *pace, *opensIn, *window, newSizes(*stock)...)
		}
		if err != nil {
			return fmt.Errorf("create the sale: %w", err)
		}
		log.Printf("refunds that are due: curl -H 'Authorization: Bearer %s' '%s/v1/admin/payments?state=refund_due'",
			config.Cashier, config.API)
	}
	shop, err := newShop(config)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: shop.handler(), ReadHeaderTimeout: 2 * time.Second, ReadTimeout: 5 * time.Second}
	go func() { ended <- server.Serve(listener) }()
	if draw != nil {
		if err := draw.enter(ctx, *others, shop.token); err != nil {
			return fmt.Errorf("enter the draw: %w", err)
		}
		go func() {
			if err := draw.reveal(ctx); err != nil && ctx.Err() == nil {
				log.Print("the seed of the draw is missing: ", err)
			}
		}()
	}
	log.Printf("the shop is open: %s", origin)
	select {
	case <-ctx.Done():
		err = nil
	case err = <-ended:
	}
	log.Print("the shop closes")
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer cancel()
	if stopped := server.Shutdown(grace); stopped != nil && !errors.Is(stopped, context.DeadlineExceeded) {
		err = errors.Join(err, stopped)
	}
	shop.close()
	return err
}
