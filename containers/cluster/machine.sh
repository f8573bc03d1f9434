#!/usr/bin/env bash
# What a container of the local cluster runs: its user, its fake GPUs, munged and one Slurm daemon.
# machine.sh DAEMON UID GID GPUS, where DAEMON is slurmctld or slurmd. Ends as soon as a daemon does: a container
# that is up is a machine that works.
set -euo pipefail

machine::user() {
  local -r uid=$1 gid=$2
  getent passwd dray >/dev/null && return
  # The caller's own ids, so that what jobs write on /shared is theirs; some name in the image may have them already.
  groupadd --non-unique --gid "${gid}" dray
  # No password: sshd lets in by key whom it does not take for locked.
  # -F: apptainer's fakeroot needs subordinate ids, also for a caller whose uid is below 1000.
  useradd -F --password '*' --non-unique --uid "${uid}" --gid "${gid}" --no-create-home --home-dir /shared/home --shell /bin/bash dray
}

machine::devices() {
  local -r gpus=$1
  local gpu
  # Docker opens the device for root alone.
  chmod 666 /dev/fuse
  # Slurm counts GPUs by their device files; nothing ever computes on these.
  for ((gpu = 0; gpu < gpus; gpu++)); do
    [[ -e "/dev/fakegpu${gpu}" ]] || mknod -m 666 "/dev/fakegpu${gpu}" c 1 3
  done
}

machine::munge() {
  install --directory --owner munge --group munge --mode 755 /run/munge
  chown munge:munge /etc/munge /etc/munge/munge.key
  chmod 600 /etc/munge/munge.key
  # --force: a container that was killed leaves its socket behind.
  runuser -u munge -- munged --foreground --force &
  local -r munged=$!
  until [[ -S /run/munge/munge.socket.2 ]]; do
    kill -0 "${munged}" 2>/dev/null || { echo "machine: munged did not start" >&2; exit 69; }
    sleep 0.1
  done
}

machine::daemon() {
  local -r daemon=$1
  install --directory --owner slurm --group slurm --mode 755 /var/lib/slurm /var/lib/slurm/slurmctld
  install --directory --mode 755 /var/lib/slurm/slurmd
  "${daemon}" -D &
  # slurmctld saves the state of its jobs before it ends; without that, finished jobs run for ever.
  # shellcheck disable=SC2064  # this daemon's number, now
  trap "kill $!; wait $!; exit 0" TERM
}

main() {
  local -r daemon=$1 uid=$2 gid=$3 gpus=$4
  rm -f /run/munge/munge.socket.2
  machine::user "${uid}" "${gid}"
  machine::devices "${gpus}"
  machine::munge
  machine::daemon "${daemon}"
  local code=0
  wait -n || code=$?
  echo "machine: ${daemon} or munged ended with exit code ${code}" >&2
  exit 1
}

main "$@"
