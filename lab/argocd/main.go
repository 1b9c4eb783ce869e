// Command argocd has the programs of Argo CD that apply manifests from a repository, and the cache between them. The
// name it is called by says which it is.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"path/filepath"

	"github.com/alicebob/miniredis/v2"
	controller "github.com/argoproj/argo-cd/v3/cmd/argocd-application-controller/commands"
	applicationset "github.com/argoproj/argo-cd/v3/cmd/argocd-applicationset-controller/commands"
	reposerver "github.com/argoproj/argo-cd/v3/cmd/argocd-repo-server/commands"
	"github.com/spf13/cobra"
)

var commands = map[string]func() *cobra.Command{
	"argocd-application-controller":    controller.NewCommand,
	"argocd-applicationset-controller": applicationset.NewCommand,
	"argocd-repo-server":               reposerver.NewCommand,
	"redis":                            redis,
}

// redis is a server in memory, by which the controller and the repository server share what they have read.
func redis() *cobra.Command {
	return &cobra.Command{
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			server := miniredis.NewMiniRedis()
			if err := server.StartAddr(args[0]); err != nil {
				return err
			}
			defer server.Close()
			ended := make(chan os.Signal, 1)
			signal.Notify(ended, os.Interrupt)
			<-ended
			return nil
		},
	}
}

func main() {
	command, known := commands[filepath.Base(os.Args[0])]
	if !known {
		fmt.Fprintln(os.Stderr, "call it by the name of one of Argo CD's programs, or redis")
		os.Exit(2)
	}
	if command().Execute() != nil {
		os.Exit(1)
	}
}
