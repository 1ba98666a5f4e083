#!/usr/bin/env bash
# What `make launchers` does: installs what is missing here, runs the suite, makes the table. Tests skip what could not be had, with
# the reason. A cluster is the one of $KUBECONFIG, or else the one that ../shared/cluster makes, where that is at hand.
set -uo pipefail
cd "$(dirname "$0")/../.."
code=0 PODS='pytorchjob or trainjob or jobset or rayjob'

suite() { make e2e E2E="tests/launchers --record --dist loadscope -n $1 -k '$2' -m '$3'" || code=1; }
install_slurm() {
  command -v slurmctld && command -v munged && command -v slurmdbd && command -v mariadbd && command -v sshd && return
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm slurmdbd munge mariadb-server openssh-server
}

# Makes the cluster and breaks it: most of that is waiting, so that it goes on beside what needs no cluster.
faults() {
  if [ "${make_cluster:-}" ]; then
    (set -e && start_cluster trainer kuberay kueue) >build/launchers-cluster.log 2>&1
    [ $? = 0 ] || echo "no cluster: see build/launchers-cluster.log"  # in a condition nothing would stop at an error
  fi
  suite 3 'pytorchjob or trainjob or jobset' breaks_cluster
  suite 1 rayjob breaks_cluster  # beside the others its pods find no CPU
  return $code
}

mkdir -p build
install_slurm >build/launchers-slurm.log 2>&1 || echo "no Slurm: see build/launchers-slurm.log"
if [ -z "${KUBECONFIG:-}" ] && [ -x ../shared/cluster/cluster ]; then
  . .ci/cluster
  make_cluster=yes
fi
make .ray/.ready || echo "no Ray"
export KFTRAIN_RAY_PYTHON="${KFTRAIN_RAY_PYTHON:-$PWD/.ray/bin/python}"
faults >build/launchers-faults.log 2>&1 &
suite "$AT_ONCE" "not ($PODS)" "not breaks_cluster"
wait $! || code=1
cat build/launchers-faults.log
suite "$AT_ONCE" "$PODS" "not breaks_cluster"
.venv/bin/python tests/launchers/record.py
echo "$((SECONDS / 60)) minutes"
exit $code
