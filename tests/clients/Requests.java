import java.io.InputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Base64;

/** Sends the requests of a file, and prints the answers. Arguments: the kind of client and of bodies, and the file. */
public class Requests {
    public static void main(String[] arguments) throws Exception {
        HttpClient.Builder made = HttpClient.newBuilder();
        if (arguments[0].equals("1.1")) made.version(HttpClient.Version.HTTP_1_1); // by default it offers h2c
        HttpClient client = made.build();
        for (String line : Files.readAllLines(Path.of(arguments[2]))) {
            String[] found = line.split(" ", 4);
            byte[] body = Base64.getDecoder().decode(found[3]);
            BodyPublisher sent = arguments[1].equals("chunked")
                ? BodyPublishers.ofInputStream(() -> (InputStream) new java.io.ByteArrayInputStream(body))
                : BodyPublishers.ofByteArray(body);
            HttpRequest request = HttpRequest.newBuilder(URI.create(found[1])).header("content-type", found[2])
                .method(found[0], found[0].equals("GET") ? BodyPublishers.noBody() : sent).build();
            HttpResponse<byte[]> answer = client.send(request, HttpResponse.BodyHandlers.ofByteArray());
            System.out.println(answer.statusCode() + " " + Base64.getEncoder().encodeToString(answer.body()));
        }
    }
}
