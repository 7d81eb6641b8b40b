//! Images that VMs left behind when they moved away with their disks.

use agent::api::{Client, LeftImage, VmName};
use agent::report::bytes;

use crate::Code;
use crate::failure::Failure;
use crate::output::{Output, Text, table};

/// `whimbrel images list`.
pub(crate) fn list(client: &Client, output: &Output) -> Result<Code, Failure> {
    output.show(&client.images()?, |images: &Vec<LeftImage>| {
        if images.is_empty() {
            return "no VM has left an image here\n".to_owned();
        }
        table(["MIGRATION", "TO", "DISK", "TAKES", "IMAGE", "REMARK"], images.iter().map(row))
    });
    Ok(Code::Done)
}

fn row(image: &LeftImage) -> [String; 6] {
    [
        image.migration.to_string(),
        image.to.to_string(),
        image.disk.clone(),
        bytes(image.taken_bytes),
        image.path.display().to_string(),
        image.kept_because.as_ref().map_or_else(|| "can be removed".to_owned(), |why| format!("kept: {why}")),
    ]
}

/// `whimbrel images remove`.
pub(crate) fn remove(
    client: &Client,
    vm: &VmName,
    epoch: Option<u64>,
    output: &Output,
) -> Result<Code, Failure> {
    output.show(&client.remove_images(vm, epoch)?, |images: &Vec<LeftImage>| {
        let mut text = Text::default();
        for LeftImage { path, taken_bytes, .. } in images {
            text.line(format_args!("{} is removed, {} are free", path.display(), bytes(*taken_bytes)));
        }
        text.finish()
    });
    Ok(Code::Done)
}
