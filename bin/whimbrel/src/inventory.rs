//! VMs and the agent itself: the state of a host.

use std::path::Path;

use api::report::bytes;
use api::{
    AdoptRequest, Adopted, AgentInfo, ClaimRequest, Client, Forgotten, HostId, KernelFeature, RunRequest,
    TemplateState, VmDetail, VmName, VmSummary,
};
use serde_json::Value;

use crate::Code;
use crate::cli::AdoptCommand;
use crate::failure::Failure;
use crate::output::{Output, Text, findings, table};

/// `whimbrel info`.
pub(crate) fn agent(client: &Client, output: &Output) -> Result<Code, Failure> {
    output.show(&client.agent()?, |info: &AgentInfo| {
        let list = |hosts: &[HostId]| hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let mut text = Text::default();
        let AgentInfo { role, host, version, pid, .. } = info;
        text.line(format_args!("{role} {host} (whimbrel {version}, pid {pid})"));
        text.line(format_args!("  listens at  {}", info.listen));
        text.line(format_args!("  peers       {}", list(&info.peers)));
        let registry = info.registry.as_ref().map_or("none", HostId::as_str);
        text.line(format_args!("  registry    {registry}"));
        if let Some(controller) = &info.controller {
            let state = if controller.connected { "connected" } else { "NOT CONNECTED; see the agent's log" };
            text.line(format_args!("  controller  {}, {state}", controller.name));
        }
        if info.cordoned {
            text.line(format_args!("  cordoned    accepts no VMs; `whimbrel fleet uncordon` ends that"));
        }
        text.line(format_args!("  kernel      {}", info.kernel));
        for KernelFeature { name, present, advice } in &info.kernel_features {
            if *present {
                text.line(format_args!("    {name}: there"));
            } else {
                text.line(format_args!("    {name}: MISSING: {advice}"));
            }
        }
        if !info.templates.is_empty() {
            text.line(format_args!("  templates"));
        }
        for template in &info.templates {
            let state = match (template.state, &template.problem) {
                (TemplateState::Ready, _) => format!("{} in use", bytes(template.data_bytes.unwrap_or(0))),
                (TemplateState::Indexing, _) => "being read".to_owned(),
                (TemplateState::Failed, problem) => {
                    format!("NOT USED: {}", problem.as_deref().unwrap_or("it cannot be read"))
                }
            };
            text.line(format_args!("    {}: {state}", template.path.display()));
        }
        text.finish()
    });
    Ok(Code::Done)
}

/// `whimbrel vm list`.
pub(crate) fn list(client: &Client, output: &Output) -> Result<Code, Failure> {
    output.show(&client.vms()?, |vms: &Vec<VmSummary>| {
        if vms.is_empty() {
            return "no VMs; `whimbrel vm adopt NAME` adopts a running QEMU\n".to_owned();
        }
        let heading = ["VM", "STATE", "PID", "MEMORY", "QEMU", "MIGRATION"];
        table(heading, vms.iter().map(row))
    });
    Ok(Code::Done)
}

fn row(vm: &VmSummary) -> [String; 6] {
    [
        vm.vm.to_string(),
        vm.state.clone(),
        vm.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
        bytes(vm.ram_bytes),
        vm.qemu_version.clone(),
        vm.migration.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string),
    ]
}

/// `whimbrel vm show`.
pub(crate) fn show(client: &Client, vm: &VmName, output: &Output) -> Result<Code, Failure> {
    output.show(&client.vm(vm)?, |detail: &VmDetail| {
        let needs = detail.needs_hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
        let needs = match detail.missing_pages {
            Some(pages) => {
                format!("{needs}, until its last page has arrived: {pages} pages of 4 KiB are missing")
            }
            None => needs,
        };
        let qmp = detail.qmp.as_ref().map_or_else(|| "-".to_owned(), |path| path.display().to_string());
        let [name, state, pid, ram, version, migration] = row(&detail.summary);
        format!(
            "{name}\n  state      {state}\n  pid        {pid}\n  memory     {ram} ({})\n  QEMU       {version}\n  \
             QMP        {qmp}\n  adopted    {}\n  migration  {migration}\n  needs      {needs}\n{}{}",
            detail.ram_kind,
            detail.adopted,
            described(&detail.description),
            findings(&detail.findings),
        )
    });
    Ok(Code::Done)
}

/// Returns the part of a VM's description that users need most. All of it is printed with `--json`.
fn described(description: &Value) -> String {
    let mut text = Text::default();
    let machine = &description["machine"];
    let of_machine = |key: &str| machine[key].as_str();
    if let Some(machine_type) = of_machine("machine_type") {
        let accelerator = of_machine("accelerator").unwrap_or("unknown accelerator");
        text.line(format_args!("  machine    {machine_type}, {accelerator}"));
    }
    if let Some(cpus) = machine["cpus"].as_u64() {
        let cpu = of_machine("cpu_option").or(of_machine("cpu_type")).unwrap_or("unknown");
        text.line(format_args!("  CPUs       {cpus}, {cpu}"));
    }
    let list = |key: &str| description[key].as_array().cloned().unwrap_or_default();
    for disk in list("disks") {
        // Empty drives, which every machine has, are not shown.
        let (Some(name), Some(file)) = (disk["name"].as_str(), disk["file"].as_str()) else { continue };
        let format = disk["format"].as_str().unwrap_or("unknown format");
        let cached = if disk["direct"] == true { "past the page cache" } else { "through the page cache" };
        text.line(format_args!("  disk       {name}: {file}, {format}, {cached}"));
        for below in disk["backing_files"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            text.line(format_args!("             over {below}"));
        }
    }
    for network in list("networks") {
        let (Some(id), Some(details)) = (network["id"].as_str(), network["details"].as_str()) else {
            continue;
        };
        text.line(format_args!("  network    {id}: {details}"));
    }
    text.line(format_args!("  `--json` shows all of its description."));
    text.finish()
}

/// `whimbrel vm adopt`.
pub(crate) fn adopt(client: &Client, command: AdoptCommand, output: &Output) -> Result<Code, Failure> {
    let AdoptCommand { qemu_name, pid, qmp, name, allow_options } = command;
    // The agent may run in another directory.
    let qmp = qmp.map(|path| std::path::absolute(&path).unwrap_or(path));
    let adopted = client.adopt(&AdoptRequest { name, pid, qmp, qemu_name, allow_options })?;
    output.show(&adopted, taken);
    Ok(Code::Done)
}

/// `whimbrel vm run`.
pub(crate) fn run(
    client: &Client,
    file: &Path,
    paused: bool,
    accept_risk: bool,
    output: &Output,
) -> Result<Code, Failure> {
    let unreadable = |source| Failure::File { path: file.to_owned(), source };
    let text = std::fs::read_to_string(file).map_err(unreadable)?;
    let path = std::path::absolute(file).map_err(unreadable)?;
    output.show(&client.run(&RunRequest { path, text, paused, accept_risk })?, taken);
    Ok(Code::Done)
}

fn taken(adopted: &Adopted) -> String {
    let vm = &adopted.vm;
    let pid = vm.pid.map_or_else(String::new, |pid| format!(", pid {pid}"));
    format!(
        "{}: {}, {}, QEMU {}{pid}\n{}",
        vm.vm,
        vm.state,
        bytes(vm.ram_bytes),
        vm.qemu_version,
        findings(&adopted.findings)
    )
}

/// `whimbrel vm forget`.
pub(crate) fn forget(client: &Client, vm: &VmName, output: &Output) -> Result<Code, Failure> {
    let forgotten = client.forget(vm)?;
    output.show(&forgotten, |Forgotten { vm, pid, released }| match (pid, released) {
        (Some(pid), _) => format!("{vm} is forgotten; its QEMU keeps running (process {pid})\n"),
        (None, None) => format!("{vm} is forgotten; its QEMU had ended\n"),
        (None, Some(true)) => {
            format!("{vm} is forgotten; its QEMU had ended, and it was released in the ownership registry\n")
        }
        (None, Some(false)) => format!(
            "{vm} is forgotten; its QEMU had ended. The ownership registry does not answer and still records \
             this host as the owner: on the host where it is started again, run `whimbrel vm claim {vm}`\n"
        ),
    });
    Ok(Code::Done)
}

/// `whimbrel vm claim`.
pub(crate) fn claim(
    client: &Client,
    vm: &VmName,
    accept_risk: bool,
    output: &Output,
) -> Result<Code, Failure> {
    let report = client.claim(vm, &ClaimRequest { accept_risk })?;
    let code = if report.done { Code::Done } else { Code::Failed };
    output.show(&report, |report| {
        let mut text = Text::default();
        if report.done {
            text.line(format_args!("according to the ownership registry {vm} belongs to this host"));
            return text.finish();
        }
        text.line(format_args!("Risk:"));
        for line in &report.risked {
            text.line(format_args!("  - {line}"));
        }
        text.line(format_args!("Nothing was done. To do it anyway: `whimbrel vm claim {vm} --accept-risk`"));
        text.finish()
    });
    Ok(code)
}
