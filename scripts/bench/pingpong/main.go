// Command pingpong is the reference for latency: what a request and an answer of given sizes take over TCP, between
// two processes that do nothing else. It prints the mean in microseconds.
//
//	pingpong [-request 88] [-response 4176] [-time 3s]
//
// The defaults are the bytes of a 4 KiB read by NVMe over iWARP: a command capsule of 64 bytes; the data in an RDMA
// Write and a response capsule of 16 bytes, each with its framing.
package main

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"time"
)

func main() {
	request := flag.Int("request", 88, "bytes of a request")
	response := flag.Int("response", 4176, "bytes of an answer")
	duration := flag.Duration("time", 3*time.Second, "how long to measure")
	serve := flag.Bool("serve", false, "be the other end, for one connection, and print where")
	flag.Parse()
	var err error
	if *serve {
		err = answer(*request, *response)
	} else {
		err = measure(*request, *response, *duration)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "pingpong:", err)
		os.Exit(1)
	}
}

func answer(request, response int) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(l.Addr())
	c, err := l.Accept()
	if err != nil {
		return err
	}
	in, out := make([]byte, request), make([]byte, response)
	for {
		if _, err := io.ReadFull(c, in); err != nil {
			return nil // the other end is done
		}
		if _, err := c.Write(out); err != nil {
			return err
		}
	}
}

func measure(request, response int, duration time.Duration) error {
	server := exec.Command(os.Args[0], "-serve", fmt.Sprint("-request=", request), fmt.Sprint("-response=", response))
	server.Stderr = os.Stderr
	stdout, err := server.StdoutPipe()
	if err != nil {
		return err
	}
	if err := server.Start(); err != nil {
		return err
	}
	address, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		return err
	}
	c, err := net.Dial("tcp", strings.TrimSpace(address))
	if err != nil {
		return err
	}
	out, in := make([]byte, request), make([]byte, response)
	trips := 0
	start := time.Now()
	for time.Since(start) < duration {
		if _, err := c.Write(out); err != nil {
			return err
		}
		if _, err := io.ReadFull(c, in); err != nil {
			return err
		}
		trips++
	}
	fmt.Printf("%.2f\n", float64(time.Since(start).Microseconds())/float64(trips))
	c.Close()
	return server.Wait()
}
